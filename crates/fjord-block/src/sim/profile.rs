//! Profiles: the constants of the modelled devices. Owns no state.
//!
//! `docs/sim.md` explains each constant. They are calibrated so that 4 KiB random writes show the
//! shape of Figure 9 of *Barrier-Enabled IO Stack for Flash Storage* (FAST '18); what a test
//! asserts is that shape, not the constants.

use crate::device::Capabilities;

/// Bytes of a unit of the mapping table: what the cache, the log and the flash pages are made of.
pub const UNIT_BYTES: u64 = 4096;
/// Bytes that a power cut can tear only at their borders.
pub const SECTOR_BYTES: u64 = 512;

/// How a device keeps the order of barrier writes (section 3.2 of the paper).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BarrierForm {
    /// The cache is drained epoch by epoch; parallelism ends at each barrier.
    InOrderWriteback,
    /// What the cache holds when a drain starts is one unit, which is durable whole or not at all.
    TransactionalWriteback,
    /// The flash is one log in transfer order; recovery cuts it at the first page that was not
    /// programmed. The drain runs at full speed.
    InOrderRecovery,
}

/// Where the data ends up, and how long that takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Flash chips on channels.
    Flash {
        /// Channels; transfers to the chips of one channel exclude each other.
        channel_count: u32,
        /// Chips per channel that program at the same time.
        ways_per_channel: u32,
        /// Host data per program operation, in units of [`UNIT_BYTES`].
        units_per_program: u32,
        /// Speed of a channel, in bytes per second.
        channel_bytes_per_s: u64,
        /// Time of a program operation.
        program_ns: u64,
        /// Time of a page read.
        read_ns: u64,
        /// Time until a chip has suspended a program operation for a read; None if unsupported.
        suspend_ns: Option<u64>,
    },
    /// One arm over turning platters.
    Disk {
        /// Time of a seek to the next track.
        seek_min_ns: u64,
        /// Time of a full seek; between them it grows with the square root of the distance.
        seek_max_ns: u64,
        /// Time of a turn.
        turn_ns: u64,
        /// Bytes that pass the head per second.
        media_bytes_per_s: u64,
    },
}

/// The order in which queued simple commands are transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferOrder {
    /// As they came.
    Fifo,
    /// Any, drawn from this seed.
    Random(u64),
}

/// The constants of a device. Times are in virtual nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Name for tables and the command line.
    pub name: &'static str,
    /// Short description.
    pub about: &'static str,
    /// Commands that the device accepts at a time.
    pub queue_depth: u32,
    /// The host's time to hand over one command; commands are handed over one by one.
    pub dispatch_ns: u64,
    /// The controller's time to prepare the transfer of a command. For simple commands it overlaps
    /// with the transfer before; an ordered command waits for that transfer first.
    pub setup_ns: u64,
    /// Speed of the transfer between host and device, in bytes per second.
    pub bus_bytes_per_s: u64,
    /// From the end of a write's transfer until the waiting thread runs. Several overlap.
    pub write_ack_ns: u64,
    /// The same for reads.
    pub read_ack_ns: u64,
    /// From the last program operation of a flush (or FUA write) until the waiting thread runs:
    /// the mapping table is written here.
    pub flush_ns: u64,
    /// What a barrier flag adds to `setup_ns`.
    pub barrier_ns: u64,
    /// Size of the writeback cache, in units of [`UNIT_BYTES`].
    pub cache_units: u32,
    /// The cache survives a power cut (supercapacitor).
    pub power_loss_protection: bool,
    /// The barrier command, if there is one.
    pub barrier: Option<BarrierForm>,
    /// Order of the transfers of simple commands.
    pub transfer_order: TransferOrder,
    /// Where the data ends up.
    pub medium: Medium,
}

/// The flash of a modern NVMe drive behind so many channels.
const fn nvme_flash(channel_count: u32) -> Medium {
    Medium::Flash {
        channel_count,
        ways_per_channel: 4,
        units_per_program: 16,
        channel_bytes_per_s: 1_600_000_000,
        program_ns: 660_000,
        read_ns: 45_000,
        suspend_ns: Some(10_000),
    }
}

impl Profile {
    /// The mobile storage of the paper: UFS 2.0 with one channel and an LFS-like log.
    pub const UFS: Profile = Profile {
        name: "ufs",
        about: "mobile storage, 1 channel, in-order recovery",
        queue_depth: 16,
        dispatch_ns: 8_000,
        setup_ns: 40_000,
        bus_bytes_per_s: 190_000_000,
        write_ack_ns: 60_000,
        read_ack_ns: 30_000,
        flush_ns: 230_000,
        barrier_ns: 0,
        cache_units: 16,
        power_loss_protection: false,
        barrier: Some(BarrierForm::InOrderRecovery),
        transfer_order: TransferOrder::Random(1),
        medium: Medium::Flash {
            channel_count: 1,
            ways_per_channel: 4,
            units_per_program: 1,
            channel_bytes_per_s: 400_000_000,
            program_ns: 190_000,
            read_ns: 60_000,
            suspend_ns: None,
        },
    };

    /// The SATA SSD of the paper without power-loss protection.
    pub const PLAIN_SSD: Profile = Profile {
        name: "plain-ssd",
        about: "SATA, 8 channels, transactional writeback",
        queue_depth: 32,
        dispatch_ns: 2_000,
        setup_ns: 4_400,
        bus_bytes_per_s: 520_000_000,
        write_ack_ns: 17_000,
        read_ack_ns: 12_000,
        flush_ns: 855_000,
        barrier_ns: 600,
        cache_units: 256,
        power_loss_protection: false,
        barrier: Some(BarrierForm::TransactionalWriteback),
        transfer_order: TransferOrder::Random(2),
        medium: Medium::Flash {
            channel_count: 8,
            ways_per_channel: 4,
            units_per_program: 4,
            channel_bytes_per_s: 400_000_000,
            program_ns: 1_450_000,
            read_ns: 60_000,
            suspend_ns: Some(20_000),
        },
    };

    /// The SATA SSD of the paper with a supercapacitor, in its steady state: of each program
    /// operation a quarter is host data, the rest garbage collection.
    pub const SUPERCAP_SSD: Profile = Profile {
        name: "supercap-ssd",
        about: "SATA, 8 channels, power-loss protection",
        queue_depth: 32,
        dispatch_ns: 2_000,
        setup_ns: 30_000,
        bus_bytes_per_s: 300_000_000,
        write_ack_ns: 56_000,
        read_ack_ns: 20_000,
        flush_ns: 10_000,
        barrier_ns: 0,
        cache_units: 1024,
        power_loss_protection: true,
        barrier: Some(BarrierForm::TransactionalWriteback),
        transfer_order: TransferOrder::Random(3),
        medium: Medium::Flash {
            channel_count: 8,
            ways_per_channel: 4,
            units_per_program: 1,
            channel_bytes_per_s: 400_000_000,
            program_ns: 1_270_000,
            read_ns: 60_000,
            suspend_ns: Some(20_000),
        },
    };

    /// A modern NVMe drive for clients, with a barrier command added.
    pub const NVME: Profile = Profile {
        name: "nvme",
        about: "PCIe, 8 channels, transactional writeback",
        queue_depth: 64,
        dispatch_ns: 700,
        setup_ns: 600,
        bus_bytes_per_s: 6_000_000_000,
        write_ack_ns: 9_000,
        read_ack_ns: 8_000,
        flush_ns: 300_000,
        barrier_ns: 60,
        cache_units: 1024,
        power_loss_protection: false,
        barrier: Some(BarrierForm::TransactionalWriteback),
        transfer_order: TransferOrder::Random(4),
        medium: nvme_flash(8),
    };

    /// What parallel journaling was measured on (FAST '18): the flash of [`Profile::NVME`] behind 18 channels, with a
    /// cache that survives a power cut.
    pub const P3700: Profile = Profile {
        name: "p3700",
        about: "NVMe, 18 channels, power loss protection",
        power_loss_protection: true,
        flush_ns: 5_000,
        cache_units: 4096,
        medium: nvme_flash(18),
        ..Profile::NVME
    };

    /// A disk of 7,200 turns a minute with a write cache, without queueing and without barriers.
    pub const DISK: Profile = Profile {
        name: "disk",
        about: "7,200 turns a minute, write cache, no queue, no barrier",
        queue_depth: 1,
        dispatch_ns: 2_000,
        setup_ns: 20_000,
        bus_bytes_per_s: 300_000_000,
        write_ack_ns: 10_000,
        read_ack_ns: 10_000,
        flush_ns: 200_000,
        barrier_ns: 0,
        cache_units: 64,
        power_loss_protection: false,
        barrier: None,
        transfer_order: TransferOrder::Fifo,
        medium: Medium::Disk {
            seek_min_ns: 500_000,
            seek_max_ns: 16_000_000,
            turn_ns: 8_333_333,
            media_bytes_per_s: 150_000_000,
        },
    };

    /// All profiles, in the order of tables.
    pub const ALL: [&'static Profile; 6] =
        [&Self::UFS, &Self::PLAIN_SSD, &Self::SUPERCAP_SSD, &Self::NVME, &Self::P3700, &Self::DISK];

    /// The profile of a name.
    pub fn from_name(name: &str) -> Option<&'static Profile> {
        Profile::ALL.into_iter().find(|profile| profile.name == name)
    }

    /// The same device with chips that end each program operation before they read.
    pub fn without_suspension(&self) -> Profile {
        let mut other = self.clone();
        if let Medium::Flash { suspend_ns, .. } = &mut other.medium {
            *suspend_ns = None;
        }
        other
    }

    /// Capabilities of a device of this profile.
    pub fn capabilities(&self) -> Capabilities {
        Capabilities {
            volatile_cache: !self.power_loss_protection,
            fua: true,
            native_barrier: self.barrier.is_some(),
            discard: true,
            queue_depth: self.queue_depth,
            logical_block_size: SECTOR_BYTES as u32,
            read_only: false,
        }
    }

    /// Time of a transfer over the bus, in virtual ns.
    pub fn transfer_ns(&self, bytes: u64) -> u64 {
        time_ns(bytes, self.bus_bytes_per_s)
    }
}

/// Nanoseconds that `bytes` take at `bytes_per_s`.
pub(super) fn time_ns(bytes: u64, bytes_per_s: u64) -> u64 {
    let ns = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX)
}
