"""The type checker that conftest puts on every function of dcd_core while tests run."""

from beartype import BeartypeConf, beartype

# a whole number is a fine float; everything else must be what its annotation says, shapes of tensors included
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
