"""A Llama-type decoder over packed documents that opens up at the core-attention boundary.

The model never computes core attention itself: it is handed a callable. `config` is torch-free; import the rest from
`steelyard.model.transformer`, `.layers`, `.loss` and `.weights`.
"""
