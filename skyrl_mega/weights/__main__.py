"""`python -m skyrl_mega.weights plan`: what a weight sync moves, over which links, in what time. Needs no GPU.

`python -m skyrl_mega.weights check`: whether the engines compute with what the policy holds, after real syncs.
`python -m skyrl_mega.weights logprobs`: whether engine, policy and transformers find the same log-probs with it.
"""

from skyrl_mega.cluster import driver

if __name__ == "__main__":
    driver.start("nothing is left of it, and the same command begins again")
    from skyrl_mega.cli.weights import main  # only the driver needs what it imports

    driver.run(main)
