"""METP's memory beside that of other ways to share a sequence: the paper's formulas, and what is measured."""
