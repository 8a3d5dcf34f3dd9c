"""The code reward, and the programs that it runs in its sandboxes.

The source of these programs is copied into the sandboxes; nothing here imports them.
"""
