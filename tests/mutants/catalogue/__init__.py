"""Every mutant, in the order of the rooms."""

from mutants.catalogue.attention import ATTENTION
from mutants.catalogue.bookkeeping import BOOKKEEPING
from mutants.catalogue.companions import COMPANIONS
from mutants.catalogue.devices import DEVICES
from mutants.catalogue.drafts import DRAFTS
from mutants.catalogue.machine import MACHINE
from mutants.catalogue.paging import PAGING
from mutants.catalogue.probes import PROBES
from mutants.catalogue.recurrent import RECURRENT
from mutants.catalogue.runtime import RUNTIME
from mutants.catalogue.sampling import SAMPLING
from mutants.catalogue.selection import SELECTION
from mutants.catalogue.snapshots import SNAPSHOTS
from mutants.catalogue.windows import WINDOWS

CATALOGUE = (
    *ATTENTION,
    *SELECTION,
    *PAGING,
    *BOOKKEEPING,
    *SNAPSHOTS,
    *WINDOWS,
    *PROBES,
    *RUNTIME,
    *SAMPLING,
    *COMPANIONS,
    *DRAFTS,
    *RECURRENT,
    *DEVICES,
    *MACHINE,
)
