//! The log mechanism: handles, transactions, commit, checkpoint, revoke, recovery. Knows no ext4.
