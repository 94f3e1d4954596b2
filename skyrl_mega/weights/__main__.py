"""The commands of `python -m skyrl_mega.weights`.

`plan` prints the bytes, links and predicted time of a weight sync, without a GPU.
`check` compares the engines' weights with the policy's after real syncs.
`logprobs` compares the log-probs of engine, policy and transformers with these weights.
"""

from skyrl_mega.cluster import driver

if __name__ == "__main__":
    driver.start("nothing was saved; the same command starts from the beginning")
    from skyrl_mega.cli.weights import main  # imported late: only the driver needs its packages

    driver.run(main)
