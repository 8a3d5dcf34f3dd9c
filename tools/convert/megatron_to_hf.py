"""`slimx convert megatron-to-hf` as a script: python tools/convert/megatron_to_hf.py --help"""

import sys

from slimx.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert", "megatron-to-hf"]
    main()
