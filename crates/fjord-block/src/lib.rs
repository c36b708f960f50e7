//! The block layer: order apart from durability, asynchronous tickets, file and memory backends.
