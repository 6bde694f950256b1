"""Torch's private names that `graphrt.compile` uses, behind typed functions.

Nothing is looked up before it is needed, as importing graphrt must load no compiler. Where this
torch lacks a name, its function raises `MissingTorchNameError`, or does as the name's `without`
says.
"""
