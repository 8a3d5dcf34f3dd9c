"""`slimx convert hf-to-fp8` as a script: python tools/convert/hf_to_fp8.py --help"""

import sys

from slimx.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert", "hf-to-fp8"]
    main()
