"""What the commands refuse with: here alone, so that the command line can catch it and import nothing else."""


class OptionError(ValueError):
    """An option that does not exist, or not with the others."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as what it says it is; the message names file, tensor, found and expected."""


class ModelError(ValueError):
    """An exported model that is not what it says it is; the message names file, tensor, found and expected."""


class ContextError(ModelError):
    """A prompt that does not fit into the model's context."""
