"""The contract of an exported folder: what the export writes there and what programs read from it.

``files`` names the files. ``interface`` names a model's inputs and outputs, ``metadata`` the keys of its metadata.
``record`` ties the files of one export together. ``model_file`` finds and loads a model.
"""
