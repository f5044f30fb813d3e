"""The folder that an export writes, and the dry run."""
