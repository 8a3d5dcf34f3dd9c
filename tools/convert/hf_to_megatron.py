"""`slimx convert hf-to-megatron` as a script: python tools/convert/hf_to_megatron.py --help"""

import sys

from slimx.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert", "hf-to-megatron"]
    main()
