"""SGLang's engine on a GPU without a network: eagerly, and by graphs."""
