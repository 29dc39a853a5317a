"""Plain values that every other part of Steelyard speaks: documents, layouts, tasks and plans.

Pure standard library and numpy. Nothing here decides anything and nothing here moves tensors.
"""
