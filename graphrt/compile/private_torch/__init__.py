"""What `graphrt.compile` uses of torch that is not public, behind typed functions.

Nothing is looked up before it is needed, as importing graphrt must load no compiler. Where this
torch lacks a name, what needs it raises `MissingTorchNameError`, or does as the name's `without`
says.
"""
