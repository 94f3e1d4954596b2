"""The exception for failures outside an environment's own logic."""


class InfrastructureFault(RuntimeError):
    """A failure of a service below an environment, caused neither by the environment's logic nor by the policy's text:
    a sandbox did not start, a database is unreachable, a checker was killed.

    The trajectory is retried from the prompt, up to `environment.retries` times; then the trajectory counts as failed.
    """
