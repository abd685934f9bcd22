//! Configuration space: typed access through a transport, the command register, the header.
//!
//! Configuration accesses are exempt from generations ([`Transport::expire`]): the ladder must
//! reach the command register of a function whose life is over (R4.2).

use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use bitflags::bitflags;
use thiserror::Error;

use crate::id::{DeviceId, Generation};
use crate::transport::{AccessError, RegionIndex, Transport};

/// Bytes of a function's configuration space without the PCIe extension.
pub const STANDARD_SIZE: usize = 256;
/// Bytes of a PCIe function's configuration space.
pub const EXTENDED_SIZE: usize = 4096;

/// Offsets in the type 0 header, in bytes (PCIe base specification 6.0, §7.5.1).
pub mod offset {
    /// Vendor ID, 16 bits.
    pub const VENDOR: u16 = 0x00;
    /// Device ID, 16 bits.
    pub const DEVICE: u16 = 0x02;
    /// Command register, 16 bits.
    pub const COMMAND: u16 = 0x04;
    /// Status register, 16 bits.
    pub const STATUS: u16 = 0x06;
    /// Revision ID, 8 bits; the 24-bit class code follows.
    pub const REVISION: u16 = 0x08;
    /// Header type, 8 bits; bit 7 says that the device has several functions.
    pub const HEADER_TYPE: u16 = 0x0e;
    /// First of six 32-bit base address registers.
    pub const BAR0: u16 = 0x10;
    /// Subsystem vendor ID, 16 bits.
    pub const SUBSYSTEM_VENDOR: u16 = 0x2c;
    /// Subsystem device ID, 16 bits.
    pub const SUBSYSTEM_DEVICE: u16 = 0x2e;
    /// Offset of the first capability, 8 bits.
    pub const CAPABILITIES: u16 = 0x34;
    /// Offset of the first extended capability's header, 32 bits.
    pub const EXTENDED_CAPABILITIES: u16 = 0x100;
}

bitflags! {
    /// The command register (PCIe base specification 6.0, §7.5.1.1.3).
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Command: u16 {
        /// The function answers I/O accesses.
        const IO_SPACE = 1 << 0;
        /// The function answers memory accesses: its BARs are alive.
        const MEMORY_SPACE = 1 << 1;
        /// The function may issue memory requests: DMA and MSI.
        const BUS_MASTER = 1 << 2;
        /// Poisoned packets are reported.
        const PARITY_ERROR_RESPONSE = 1 << 6;
        /// Errors are reported to the root complex.
        const SERR = 1 << 8;
        /// The function raises no INTx interrupts. Virtual in kernel VFIO.
        const INTX_DISABLE = 1 << 10;
        // Other bits are kept as read.
        const _ = !0;
    }
}

impl Command {
    /// Bits 15:11, which read zero on a live function.
    pub(crate) const RESERVED: u16 = 0xf800;

    /// Whether a function that was told to answer memory accesses can have given this reading.
    ///
    /// A vanished function reads as all-ones or zero; kernel VFIO overlays INTx Disable, so that
    /// all-ones arrives as 0xfbff. Bits 15:11 are reserved and read zero on a live function, and
    /// Memory Space Enable, which [`CommandRegister`] always sets, reads one.
    #[must_use]
    pub const fn is_answer(self) -> bool {
        self.bits() & Self::RESERVED == 0 && self.contains(Self::MEMORY_SPACE)
    }
}

bitflags! {
    /// The status register (PCIe base specification 6.0, §7.5.1.1.4).
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Status: u16 {
        /// An INTx interrupt is pending.
        const INTERRUPT = 1 << 3;
        /// The function has a capability list.
        const CAPABILITIES = 1 << 4;
        /// A poisoned packet was received or sent.
        const MASTER_DATA_PARITY_ERROR = 1 << 8;
        /// A request to the function was aborted by the function.
        const SIGNALED_TARGET_ABORT = 1 << 11;
        /// A request of the function was aborted by its completer.
        const RECEIVED_TARGET_ABORT = 1 << 12;
        /// A request of the function was answered with Unsupported Request.
        const RECEIVED_MASTER_ABORT = 1 << 13;
        /// The function reported a system error.
        const SIGNALED_SYSTEM_ERROR = 1 << 14;
        /// A poisoned packet was received.
        const DETECTED_PARITY_ERROR = 1 << 15;
        // Other bits are kept as read.
        const _ = !0;
    }
}

/// The configuration space of an opened function.
#[derive(Clone, Copy, Debug)]
pub struct ConfigSpace<'a> {
    transport: &'a dyn Transport,
}

impl<'a> ConfigSpace<'a> {
    /// The configuration space of the function behind `transport`.
    #[must_use]
    pub fn new(transport: &'a dyn Transport) -> Self {
        Self { transport }
    }

    /// Which function's it is.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.transport.id()
    }

    /// The function's name, for messages.
    #[must_use]
    pub fn device_name(&self) -> &'a str {
        self.transport.name()
    }

    /// Where the first standard capability of this kind is, in bytes: a walk of the list, reading
    /// only the list. None when there is none, or the list ends in something that is no pointer.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the transport refuses or fails.
    pub fn find_capability(&self, id: u16) -> Result<Option<u16>, AccessError> {
        // As many capabilities of four bytes as fit behind the header: a cyclic list ends, too.
        const MOST: usize = (STANDARD_SIZE - 0x40) / 4;
        if !self.status()?.contains(Status::CAPABILITIES) {
            return Ok(None);
        }
        let mut at = u16::from(self.read_u8(offset::CAPABILITIES)?) & !3;
        for _ in 0..MOST {
            if at < 0x40 {
                break;
            }
            let [found, next] = self.read_u16(at)?.to_le_bytes();
            if found == 0xff {
                break;
            }
            if u16::from(found) == id {
                return Ok(Some(at));
            }
            at = u16::from(next) & !3;
        }
        Ok(None)
    }

    /// Reads 8 bits at `offset` bytes.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the transport refuses or fails.
    pub fn read_u8(&self, offset: u16) -> Result<u8, AccessError> {
        self.read(offset).map(u8::from_le_bytes)
    }

    /// Reads 16 bits at `offset` bytes.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the transport refuses or fails.
    pub fn read_u16(&self, offset: u16) -> Result<u16, AccessError> {
        self.read(offset).map(u16::from_le_bytes)
    }

    /// Reads 32 bits at `offset` bytes.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the transport refuses or fails.
    pub fn read_u32(&self, offset: u16) -> Result<u32, AccessError> {
        self.read(offset).map(u32::from_le_bytes)
    }

    /// Writes 8 bits at `offset` bytes.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the transport refuses or fails.
    pub fn write_u8(&self, offset: u16, value: u8) -> Result<(), AccessError> {
        self.write(offset, &value.to_le_bytes())
    }

    /// Writes 16 bits at `offset` bytes.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the transport refuses or fails.
    pub fn write_u16(&self, offset: u16, value: u16) -> Result<(), AccessError> {
        self.write(offset, &value.to_le_bytes())
    }

    /// Writes 32 bits at `offset` bytes.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the transport refuses or fails.
    pub fn write_u32(&self, offset: u16, value: u32) -> Result<(), AccessError> {
        self.write(offset, &value.to_le_bytes())
    }

    /// Reads the command register.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the transport refuses or fails.
    pub fn command(&self) -> Result<Command, AccessError> {
        self.read_u16(offset::COMMAND)
            .map(Command::from_bits_retain)
    }

    /// Reads the status register.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the transport refuses or fails.
    pub fn status(&self) -> Result<Status, AccessError> {
        self.read_u16(offset::STATUS).map(Status::from_bits_retain)
    }

    /// Reads the type 0 header: 64 bytes.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the transport refuses or fails.
    pub fn read_header(&self) -> Result<[u8; 0x40], AccessError> {
        let mut header = [0; 0x40];
        for (dword, offset) in header.chunks_exact_mut(4).zip((0..).step_by(4)) {
            dword.copy_from_slice(&self.read_u32(offset)?.to_le_bytes());
        }
        Ok(header)
    }

    /// Reads all of it: 256 or 4096 bytes, as the capability parser takes it.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the transport refuses or fails.
    pub fn read_all(&self) -> Result<Vec<u8>, AccessError> {
        let size = usize::try_from(self.transport.region(RegionIndex::Config).size)
            .unwrap_or(EXTENDED_SIZE)
            .min(EXTENDED_SIZE);
        let mut bytes = vec![0; size];
        // By dwords: the only width that every function must support.
        for (index, dword) in bytes.chunks_mut(4).enumerate() {
            self.transport.read(
                Generation::FIRST,
                RegionIndex::Config,
                index as u64 * 4,
                dword,
            )?;
        }
        Ok(bytes)
    }

    fn read<const N: usize>(&self, offset: u16) -> Result<[u8; N], AccessError> {
        let mut bytes = [0; N];
        self.transport.read(
            Generation::FIRST,
            RegionIndex::Config,
            offset.into(),
            &mut bytes,
        )?;
        Ok(bytes)
    }

    fn write(&self, offset: u16, bytes: &[u8]) -> Result<(), AccessError> {
        self.transport
            .write(Generation::FIRST, RegionIndex::Config, offset.into(), bytes)
    }
}

/// What identifies a function: the type 0 header's constant fields.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Revision ID.
    pub revision: u8,
    /// Class code: base class, subclass and programming interface in bits 23:16, 15:8, 7:0.
    pub class: u32,
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem device ID.
    pub subsystem_device: u16,
}

impl Identity {
    /// Takes the fields out of a configuration space; none when it is shorter than a header.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let header: &[u8; 0x40] = bytes.first_chunk()?;
        let u16_at = |offset: u16| {
            let at = usize::from(offset);
            u16::from_le_bytes([header[at], header[at + 1]])
        };
        Some(Self {
            vendor: u16_at(offset::VENDOR),
            device: u16_at(offset::DEVICE),
            revision: header[usize::from(offset::REVISION)],
            class: u32::from_le_bytes([header[9], header[10], header[11], 0]),
            subsystem_vendor: u16_at(offset::SUBSYSTEM_VENDOR),
            subsystem_device: u16_at(offset::SUBSYSTEM_DEVICE),
        })
    }
}

/// Bus mastering that could not be shown to be off, or on.
#[derive(Debug, Error)]
pub enum CommandError {
    /// The configuration access itself failed.
    #[error("the command register could not be reached")]
    Access(#[from] AccessError),
    /// The configuration space is that of another function than the register; nothing was written.
    #[error("{device}: the command register of another function was used on this one")]
    Foreign {
        /// The function's name.
        device: String,
    },
    /// What came back is not a live function's command register: the function is gone, for now.
    #[error(
        "{device}: wrote {written:#06x} to the command register and read {read:#06x} back, which no \
         live function answers"
    )]
    NoAnswer {
        /// The function's name.
        device: String,
        /// What was written.
        written: u16,
        /// What came back.
        read: u16,
    },
    /// The function answers, and Bus Master Enable is not what was written.
    #[error(
        "{device}: wrote {written:#06x} to the command register and read {read:#06x} back: Bus Master \
         Enable did not take"
    )]
    NotTaken {
        /// The function's name.
        device: String,
        /// What was written.
        written: u16,
        /// What came back.
        read: u16,
    },
}

/// Witness: Bus Master Enable read back clear on a function that answered (R4.2).
#[derive(Debug)]
#[must_use]
pub struct BusMasterOff {
    device: DeviceId,
    masterings: u64,
}

impl BusMasterOff {
    /// Which function.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// How often bus mastering had been turned on before.
    pub(crate) fn masterings(&self) -> u64 {
        self.masterings
    }
}

/// The command register of one function, and the word that we last chose for it.
///
/// The word that the ladder writes is this one, never one derived from a reading: a reading taken
/// in trouble may be all-ones, and writing that back would turn bus mastering on (C47).
#[derive(Debug)]
pub struct CommandRegister {
    device: DeviceId,
    known: AtomicU16,
    /// How often bus mastering was turned on; once more if it was on when the function was opened.
    masterings: AtomicU64,
    /// How many of them ended in a proven reset.
    ended: AtomicU64,
}

impl CommandRegister {
    /// Reads what the platform chose from a function just opened, before any trouble. Once for one
    /// opening: only one register knows whether bus mastering was ever on.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the transport refuses or fails.
    pub fn open(config: &ConfigSpace<'_>) -> Result<Self, AccessError> {
        Ok(Self::new(config.device(), config.command()?))
    }

    /// Begins with Memory Space Enable and INTx Disable, plus of `platform` only what the platform
    /// chose: error reporting and I/O decoding.
    fn new(device: DeviceId, platform: Command) -> Self {
        let kept = if platform.bits() & Command::RESERVED == 0 {
            platform & (Command::IO_SPACE | Command::PARITY_ERROR_RESPONSE | Command::SERR)
        } else {
            Command::empty()
        };
        let known = kept | Command::MEMORY_SPACE | Command::INTX_DISABLE;
        Self {
            device,
            known: AtomicU16::new(known.bits()),
            masterings: AtomicU64::new(platform.contains(Command::BUS_MASTER).into()),
            ended: AtomicU64::new(0),
        }
    }

    /// The word last chosen.
    #[must_use]
    pub fn known(&self) -> Command {
        Command::from_bits_retain(self.known.load(Ordering::Acquire))
    }

    /// Which function's it is.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Whether bus mastering may have been on since the function was opened, or since the last
    /// proven reset.
    #[must_use]
    pub fn was_master(&self) -> bool {
        self.ended.load(Ordering::Acquire) != self.masterings()
    }

    /// How often bus mastering was turned on.
    pub(crate) fn masterings(&self) -> u64 {
        self.masterings.load(Ordering::Acquire)
    }

    /// The function was reset, provably, after bus mastering had been turned on so often.
    pub(crate) fn forget_masterings(&self, masterings: u64) {
        self.ended.fetch_max(masterings, Ordering::AcqRel);
    }

    /// Turns memory decoding on, leaving bus mastering off, and reads it back.
    ///
    /// # Errors
    ///
    /// [`CommandError`]; bus mastering may then be in any state.
    pub fn memory_space_on(&self, config: &ConfigSpace<'_>) -> Result<(), CommandError> {
        self.write_known(config, false)
    }

    /// Turns bus mastering on and reads it back. Only for a caller that holds the ladder's lock
    /// and has looked at the broken state under it (R10).
    ///
    /// # Errors
    ///
    /// [`CommandError`]; bus mastering may then be in any state.
    pub fn bus_master_on(&self, config: &ConfigSpace<'_>) -> Result<(), CommandError> {
        self.write_known(config, true)
    }

    /// Writes the known word without Bus Master Enable and reads it back (R4.2).
    ///
    /// # Errors
    ///
    /// [`CommandError`]; the function may then still issue DMA. `NoAnswer` is a verdict of the
    /// moment: try again until the deadline, and again at the end of the ladder.
    pub fn bus_master_off(&self, config: &ConfigSpace<'_>) -> Result<BusMasterOff, CommandError> {
        // Before the write: what is turned on meanwhile is not covered.
        let masterings = self.masterings();
        self.write_known(config, false)?;
        Ok(BusMasterOff {
            device: config.device(),
            masterings,
        })
    }

    fn write_known(&self, config: &ConfigSpace<'_>, bus_master: bool) -> Result<(), CommandError> {
        if config.device() != self.device {
            return Err(CommandError::Foreign {
                device: config.transport.name().to_owned(),
            });
        }
        let bit = Command::BUS_MASTER.bits();
        if bus_master {
            // Before the write: whatever comes of it, it may have taken.
            self.masterings.fetch_add(1, Ordering::AcqRel);
        }
        let word = if bus_master {
            self.known.fetch_or(bit, Ordering::AcqRel) | bit
        } else {
            self.known.fetch_and(!bit, Ordering::AcqRel) & !bit
        };
        config.write_u16(offset::COMMAND, word)?;
        let read = config.command()?;
        let device = || config.transport.name().to_owned();
        if !read.is_answer() {
            return Err(CommandError::NoAnswer {
                device: device(),
                written: word,
                read: read.bits(),
            });
        }
        if read.contains(Command::BUS_MASTER) != bus_master {
            return Err(CommandError::NotTaken {
                device: device(),
                written: word,
                read: read.bits(),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{FakeFunction, Happened, Reading, limits_39_bits};

    fn fake() -> FakeFunction {
        FakeFunction::new(limits_39_bits()).unwrap()
    }

    fn written(function: &FakeFunction) -> Vec<u16> {
        let words = function.log().into_iter().filter_map(|entry| match entry {
            Happened::Command(word) => Some(word),
            _ => None,
        });
        words.collect()
    }

    fn register(function: &FakeFunction, platform: Command) -> CommandRegister {
        CommandRegister::new(function.id(), platform)
    }

    #[test]
    fn fields_are_little_endian() {
        let function = fake().with_config(&(0..=255).collect::<Vec<u8>>());
        let config = ConfigSpace::new(&function);
        assert_eq!(config.read_u8(0x10).unwrap(), 0x10);
        assert_eq!(config.read_u16(0x10).unwrap(), 0x1110);
        assert_eq!(config.read_u32(0x10).unwrap(), 0x1312_1110);
        assert_eq!(config.read_all().unwrap(), (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn identity_is_parsed() {
        let bytes: Vec<u8> = (0..64).collect();
        let identity = Identity::parse(&bytes).unwrap();
        assert_eq!(identity.vendor, 0x0100);
        assert_eq!(identity.device, 0x0302);
        assert_eq!(identity.revision, 0x08);
        assert_eq!(identity.class, 0x0b_0a09);
        assert_eq!(identity.subsystem_device, 0x2f2e);
        assert_eq!(Identity::parse(&bytes[..63]), None);
    }

    /// (R4.2)
    #[test]
    fn bus_master_off_is_witnessed_when_it_reads_clear() {
        let function = fake();
        let config = ConfigSpace::new(&function);
        let register = register(&function, Command::SERR);
        register.bus_master_on(&config).unwrap();
        let off = register.bus_master_off(&config).unwrap();
        assert_eq!(off.device(), function.id());
        assert_eq!(written(&function), [0x0506, 0x0502]);
    }

    /// (R4.2)
    #[test]
    fn c47_the_known_word_is_written_although_the_function_reads_all_ones() {
        let function = fake();
        function.misread_config(Reading::AllOnes, u64::MAX);
        let config = ConfigSpace::new(&function);
        let register = register(&function, Command::empty());
        assert!(matches!(
            register.bus_master_off(&config),
            Err(CommandError::NoAnswer { read: 0xffff, .. })
        ));
        assert_eq!(written(&function), [0x0402]);
    }

    #[test]
    fn c47_nothing_of_an_all_ones_reading_is_kept_at_open() {
        let register = register(&fake(), Command::from_bits_retain(0xfbff));
        assert_eq!(
            register.known(),
            Command::MEMORY_SPACE | Command::INTX_DISABLE
        );
    }

    #[test]
    fn bus_master_is_never_taken_over_from_a_reading() {
        let register = register(&fake(), Command::from_bits_retain(0x0147));
        assert_eq!(register.known().bits(), 0x0543);
    }

    #[test]
    fn c32_zero_is_no_answer() {
        let function = fake();
        function.misread_config(Reading::Zero, 1);
        let error = register(&function, Command::empty())
            .bus_master_off(&ConfigSpace::new(&function))
            .unwrap_err();
        assert!(matches!(error, CommandError::NoAnswer { read: 0, .. }));
    }

    /// (R4.2)
    #[test]
    fn bus_master_that_stays_on_is_an_error() {
        let function = fake();
        function.set_reads_as_master(true);
        let error = register(&function, Command::empty())
            .bus_master_off(&ConfigSpace::new(&function))
            .unwrap_err();
        assert!(matches!(error, CommandError::NotTaken { read: 0x0406, .. }));
    }
}
