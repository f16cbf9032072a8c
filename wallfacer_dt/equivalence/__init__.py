"""Whether a style computes what the module computes that it replaces: both are tried out on one short sequence.

A style can see what a module is called with, not what its forward does. Attention whose window, sinks, scale or soft
cap stand in its code would train on as something else, and no shape would show it.
"""
