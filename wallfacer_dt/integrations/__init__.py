"""Libraries of models, made context parallel from outside: each imported only when asked for, with an extra to it."""
