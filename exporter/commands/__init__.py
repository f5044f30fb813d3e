"""The commands of ``quantmoe``, one file each. Each prints for people and calls the function of its name."""
