"""Every mutant, in the order of the rooms."""

from mutants.catalogue.admission import ADMISSION
from mutants.catalogue.attention import ATTENTION
from mutants.catalogue.audits import AUDITS
from mutants.catalogue.blocks import BLOCKS
from mutants.catalogue.bookkeeping import BOOKKEEPING
from mutants.catalogue.buckets import BUCKETS
from mutants.catalogue.codes import CODES
from mutants.catalogue.commands import COMMANDS
from mutants.catalogue.companions import COMPANIONS
from mutants.catalogue.compressed_weights import COMPRESSED_WEIGHTS
from mutants.catalogue.connectors import CONNECTORS
from mutants.catalogue.devices import DEVICES
from mutants.catalogue.drafts import DRAFTS
from mutants.catalogue.durability import DURABILITY
from mutants.catalogue.front_door import FRONT_DOOR
from mutants.catalogue.given import GIVEN_ROWS
from mutants.catalogue.gradients import GRADIENTS
from mutants.catalogue.identity import IDENTITY
from mutants.catalogue.lifetimes import LIFETIMES
from mutants.catalogue.machine import MACHINE
from mutants.catalogue.own_attention import OWN_ATTENTION
from mutants.catalogue.own_products import OWN_PRODUCTS
from mutants.catalogue.ownership import OWNERSHIP
from mutants.catalogue.paging import PAGING
from mutants.catalogue.probes import PROBES
from mutants.catalogue.quantised import QUANTISED
from mutants.catalogue.recurrent import RECURRENT
from mutants.catalogue.remembered import REMEMBERED
from mutants.catalogue.results import RESULTS
from mutants.catalogue.rotary import ROTARY
from mutants.catalogue.runtime import RUNTIME
from mutants.catalogue.sampling import SAMPLING
from mutants.catalogue.segments import SEGMENT_MUTANTS
from mutants.catalogue.selection import SELECTION
from mutants.catalogue.serving import SERVING
from mutants.catalogue.snapshots import SNAPSHOTS
from mutants.catalogue.transformers_caches import TRANSFORMERS_CACHES
from mutants.catalogue.windows import WINDOWS

CATALOGUE = (
    *ADMISSION,
    *SERVING,
    *AUDITS,
    *ATTENTION,
    *CODES,
    *SELECTION,
    *PAGING,
    *BOOKKEEPING,
    *OWNERSHIP,
    *GIVEN_ROWS,
    *SNAPSHOTS,
    *DURABILITY,
    *BLOCKS,
    *BUCKETS,
    *CONNECTORS,
    *IDENTITY,
    *WINDOWS,
    *PROBES,
    *OWN_ATTENTION,
    *OWN_PRODUCTS,
    *REMEMBERED,
    *COMPRESSED_WEIGHTS,
    *QUANTISED,
    *ROTARY,
    *SEGMENT_MUTANTS,
    *COMMANDS,
    *RUNTIME,
    *LIFETIMES,
    *GRADIENTS,
    *TRANSFORMERS_CACHES,
    *SAMPLING,
    *FRONT_DOOR,
    *RESULTS,
    *COMPANIONS,
    *DRAFTS,
    *RECURRENT,
    *DEVICES,
    *MACHINE,
)
