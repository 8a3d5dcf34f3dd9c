"""Programs that run in the Python environment of another project, where slimx is not installed.

Python searches a program's directory first for imports, so no file here may have the name of a package.
"""
