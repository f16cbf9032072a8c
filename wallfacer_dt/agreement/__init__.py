"""Ranks compare what they are about to do: every call on a mesh, before anything is sent or while a device works.

The lowest layer: it knows ranks and names of meshes, and nothing of attention.
"""
