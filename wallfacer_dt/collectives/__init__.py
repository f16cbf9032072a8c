"""Asynchronous, traceable collectives on flat buffers, and the packing of tensors into such buffers.

The only package that calls torch's functional collectives. Every operation returns a buffer whose contents may
be read only after :func:`wait`; a wait that takes longer than its process group's timeout raises there.
"""
