"""The error for what a user can mend; it stands alone so that importing it is cheap."""


class ConfigError(ValueError):
    """Something the user gave is wrong; the message is one line that names it and how to mend it."""


class LearnerFailure(Exception):
    """The learner broke (a rank died, memory ran out): the run must stop, and can go on from its last checkpoint."""
