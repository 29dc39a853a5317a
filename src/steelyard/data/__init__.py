"""From files to packed chunks of tokens: sources, tokenizers, lengths, packing, batches. numpy only, no torch.

`config` says what to read, `listing` finds the files, `formats` reads one file, `sources` orders and deals the
documents of a source, `stream` mixes sources and packs them into chunks, `batches` cuts tokens, labels and positions
by a layout, `lengths` measures a data set and the imbalance it would cause.
"""
