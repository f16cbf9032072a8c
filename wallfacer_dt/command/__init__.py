"""The command ``wallfacer``: what is planned, profiled and explained, for the terminal.

Only modules in here import typer, rich and matplotlib, which the package does not need otherwise.
"""
