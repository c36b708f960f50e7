//! Real tools as oracles.
