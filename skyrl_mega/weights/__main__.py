"""`python -m skyrl_mega.weights plan`: what a weight sync moves, over which links, in what time. Needs no GPU.

`python -m skyrl_mega.weights check`: whether the engines compute with what the policy holds, after real syncs.
`python -m skyrl_mega.weights logprobs`: whether engine, policy and transformers find the same log-probs with it.
"""

import sys

from skyrl_mega.cli.weights import main

if __name__ == "__main__":
    sys.exit(main())
