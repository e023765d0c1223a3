"""Why a variant is faster or is not, and how sensitive the layers of a model are to compression."""
