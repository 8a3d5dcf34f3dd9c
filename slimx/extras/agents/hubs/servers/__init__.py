"""Programs that run in the Python environment of another project, which does not have slimx.

Python searches a program's directory for imports first: no file here may have the name of a package."""
