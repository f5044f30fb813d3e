"""Times beside other engines': ``quantmoe bench``; ``kernels`` has the scripts that are in no wheel."""
