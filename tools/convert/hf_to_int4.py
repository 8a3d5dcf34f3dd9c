"""`slimx convert hf-to-int4` as a script: python tools/convert/hf_to_int4.py --help"""

import sys

from slimx.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert", "hf-to-int4"]
    main()
