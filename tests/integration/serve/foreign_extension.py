"""An extension of somebody else: vLLM has one place for such a class, and here it is taken."""

import logging


class ForeignExtension:
    """Mixed into vLLM's worker."""

    def foreign_answer(self):
        return "foreign"


logging.getLogger("vllm.foreign").warning("the foreign extension is imported")
