"""What an environment raises where it is not to blame."""


class InfrastructureFault(RuntimeError):
    """Raised by an environment when what failed is neither its own logic nor what the policy wrote, but a service under
    it: a sandbox that did not start, a database that is not reached, a checker that was killed.

    The trajectory is played again from its prompt, `environment.retries` times; then it counts as failed.
    """
