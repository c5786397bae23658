"""Every mutant, in the order of the rooms."""

from mutants.catalogue.attention import ATTENTION
from mutants.catalogue.bookkeeping import BOOKKEEPING
from mutants.catalogue.devices import DEVICES
from mutants.catalogue.machine import MACHINE
from mutants.catalogue.paging import PAGING
from mutants.catalogue.probes import PROBES
from mutants.catalogue.runtime import RUNTIME
from mutants.catalogue.sampling import SAMPLING
from mutants.catalogue.selection import SELECTION
from mutants.catalogue.snapshots import SNAPSHOTS

CATALOGUE = (
    *ATTENTION,
    *SELECTION,
    *PAGING,
    *BOOKKEEPING,
    *SNAPSHOTS,
    *PROBES,
    *RUNTIME,
    *SAMPLING,
    *DEVICES,
    *MACHINE,
)
