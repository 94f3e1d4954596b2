"""`python -m skyrl_mega.data addition|gsm8k|multiply …`: exit code 0 done, 2 the input is wrong (one line)."""

import sys

from skyrl_mega.config.errors import UserError
from skyrl_mega.data.prepare import prepare

if __name__ == "__main__":
    try:
        prepare(sys.argv[1:])
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
