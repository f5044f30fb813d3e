"""The contract of an exported folder: what the export writes there and what programs read from it.

``files`` names the files. ``interface`` names a model's inputs and outputs, ``metadata`` the keys of its metadata.
``record`` ties the files of one export together. ``model_file`` finds and loads a model.

A checkpoint has the text files, too. ``tokenizer``, ``chat_template``, ``reply_formats``, ``sampling_options`` and
``json_files`` read them, so that checkpoint and export give equal tokens.
"""
