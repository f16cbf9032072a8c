"""Libraries of models, made context parallel from outside. Each is imported only when asked for, and needs its extra."""
