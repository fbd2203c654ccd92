"""FILES: what is written and read. This room gives `IBNN` its methods for files, so the network knows none of them."""

from ibnn.files.hub import from_pretrained, push_to_hub
from ibnn.files.saving import save_pretrained
from ibnn.network import IBNN

IBNN.save_pretrained = save_pretrained
IBNN.push_to_hub = push_to_hub
IBNN.from_pretrained = staticmethod(from_pretrained)
