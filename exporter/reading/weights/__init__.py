"""Code that all formats share: how weights lie in a checkpoint, how they become matrices, and its layers of experts.

``base`` is a format. ``layers`` and ``experts`` find the layers. ``affine``, ``bits``, ``rotations`` and ``rounding``
are the arithmetic. ``unquantized`` reads floats.
"""
