"""Programs that run in the Python environment of another project, which has no slimx.

Python looks for what a program imports beside it first: no file here may have the name of a package."""
