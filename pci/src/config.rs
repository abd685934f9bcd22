//! Configuration space: typed access through a transport, the command register, the header.
//!
//! Configuration accesses are exempt from generations ([`Transport::expire`]): the ladder must
//! reach the command register of a function whose life is over (R4.2).

use std::sync::atomic::{AtomicU16, Ordering};

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
    /// Whether a function that was told to answer memory accesses can have given this reading.
    ///
    /// A vanished function reads as all-ones or zero; kernel VFIO overlays INTx Disable, so that
    /// all-ones arrives as 0xfbff. Bits 15:11 are reserved and read zero on a live function, and
    /// Memory Space Enable, which [`CommandRegister`] always sets, reads one.
    #[must_use]
    pub const fn is_answer(self) -> bool {
        self.bits() & 0xf800 == 0 && self.contains(Self::MEMORY_SPACE)
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
}

impl BusMasterOff {
    /// Which function.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }
}

/// The command register of one function, and the word that we last chose for it.
///
/// The word that the ladder writes is this one, never one derived from a reading: a reading taken
/// in trouble may be all-ones, and writing that back would turn bus mastering on (C47).
#[derive(Debug)]
pub struct CommandRegister {
    known: AtomicU16,
}

impl CommandRegister {
    /// Begins with Memory Space Enable and INTx Disable, plus of `platform`, a reading taken
    /// before any trouble, only what the platform chose: error reporting and I/O decoding.
    #[must_use]
    pub fn new(platform: Command) -> Self {
        let kept = if platform.bits() & 0xf800 == 0 {
            platform & (Command::IO_SPACE | Command::PARITY_ERROR_RESPONSE | Command::SERR)
        } else {
            Command::empty()
        };
        let known = kept | Command::MEMORY_SPACE | Command::INTX_DISABLE;
        Self {
            known: AtomicU16::new(known.bits()),
        }
    }

    /// Reads what the platform chose, for [`CommandRegister::new`], from a function just opened.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the transport refuses or fails.
    pub fn open(config: &ConfigSpace<'_>) -> Result<Self, AccessError> {
        Ok(Self::new(config.command()?))
    }

    /// The word last chosen.
    #[must_use]
    pub fn known(&self) -> Command {
        Command::from_bits_retain(self.known.load(Ordering::Acquire))
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
        self.write_known(config, false)?;
        Ok(BusMasterOff {
            device: config.transport.id(),
        })
    }

    fn write_known(&self, config: &ConfigSpace<'_>, bus_master: bool) -> Result<(), CommandError> {
        let bit = Command::BUS_MASTER.bits();
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
    use std::io;
    use std::os::fd::{BorrowedFd, OwnedFd};
    use std::sync::Mutex;

    use super::*;
    use crate::transport::{
        DmaLimits, DmaMemory, Iova, IrqError, IrqIndex, Kind, MapError, Region, ResetFailed,
        Strength, Unmapped,
    };

    /// A function that is nothing but a configuration space.
    #[derive(Debug)]
    struct Bytes {
        id: DeviceId,
        bytes: Mutex<Vec<u8>>,
        /// What reads of the command register return instead of what was written.
        command: Option<u16>,
        writes: Mutex<Vec<u16>>,
    }

    impl Bytes {
        fn new(command: Option<u16>) -> Self {
            Self {
                id: DeviceId::fresh(),
                bytes: Mutex::new((0..=255).collect()),
                command,
                writes: Mutex::new(Vec::new()),
            }
        }
    }

    impl Transport for Bytes {
        fn id(&self) -> DeviceId {
            self.id
        }
        fn name(&self) -> &str {
            "0000:01:00.0"
        }
        fn kind(&self) -> Kind {
            Kind::Container
        }
        fn strength(&self) -> Strength {
            Strength::None
        }
        fn region(&self, _: RegionIndex) -> Region {
            Region {
                size: 256,
                readable: true,
                writable: true,
                mappable: Vec::new(),
            }
        }
        fn read(
            &self,
            _: Generation,
            _: RegionIndex,
            offset: u64,
            data: &mut [u8],
        ) -> Result<(), AccessError> {
            let at = usize::try_from(offset).unwrap();
            match self.command {
                Some(word) if offset == 4 => data.copy_from_slice(&word.to_le_bytes()),
                _ => data.copy_from_slice(&self.bytes.lock().unwrap()[at..at + data.len()]),
            }
            Ok(())
        }
        fn write(
            &self,
            _: Generation,
            _: RegionIndex,
            offset: u64,
            data: &[u8],
        ) -> Result<(), AccessError> {
            let at = usize::try_from(offset).unwrap();
            self.bytes.lock().unwrap()[at..at + data.len()].copy_from_slice(data);
            if let (4, &[low, high]) = (offset, data) {
                self.writes
                    .lock()
                    .unwrap()
                    .push(u16::from_le_bytes([low, high]));
            }
            Ok(())
        }
        fn post(
            &self,
            generation: Generation,
            index: RegionIndex,
            offset: u64,
            data: &[u8],
        ) -> Result<(), AccessError> {
            self.write(generation, index, offset, data)
        }
        fn expire(&self, _: Generation) {}
        fn region_file(&self, _: RegionIndex, _: u64) -> io::Result<(OwnedFd, u64)> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn dma_limits(&self) -> io::Result<DmaLimits> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn dma_map(&self, _: Iova, _: DmaMemory<'_>) -> Result<(), MapError> {
            unreachable!("no test maps")
        }
        fn dma_unmap(&self, _: Iova, _: u64) -> Unmapped {
            Unmapped::Absent
        }
        fn irq_count(&self, _: IrqIndex) -> u32 {
            0
        }
        fn set_irqs(&self, _: IrqIndex, _: u32, _: &[BorrowedFd<'_>]) -> Result<(), IrqError> {
            Ok(())
        }
        fn reset(&self) -> Result<(), ResetFailed> {
            Ok(())
        }
    }

    #[test]
    fn fields_are_little_endian() {
        let function = Bytes::new(None);
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

    #[test]
    fn bus_master_off_is_witnessed_when_it_reads_clear() {
        let function = Bytes::new(None);
        let config = ConfigSpace::new(&function);
        let register = CommandRegister::new(Command::SERR);
        register.bus_master_on(&config).unwrap();
        let off = register.bus_master_off(&config).unwrap();
        assert_eq!(off.device(), function.id());
        assert_eq!(*function.writes.lock().unwrap(), [0x0506, 0x0502]);
    }

    #[test]
    fn c47_the_known_word_is_written_although_the_function_reads_all_ones() {
        let function = Bytes::new(Some(0xfbff));
        let config = ConfigSpace::new(&function);
        let register = CommandRegister::new(Command::empty());
        assert!(matches!(
            register.bus_master_off(&config),
            Err(CommandError::NoAnswer { read: 0xfbff, .. })
        ));
        assert_eq!(*function.writes.lock().unwrap(), [0x0402]);
    }

    #[test]
    fn c47_nothing_of_an_all_ones_reading_is_kept_at_open() {
        let register = CommandRegister::new(Command::from_bits_retain(0xfbff));
        assert_eq!(
            register.known(),
            Command::MEMORY_SPACE | Command::INTX_DISABLE
        );
    }

    #[test]
    fn bus_master_is_never_taken_over_from_a_reading() {
        let register = CommandRegister::new(Command::from_bits_retain(0x0147));
        assert_eq!(register.known().bits(), 0x0543);
    }

    #[test]
    fn c32_zero_is_no_answer() {
        let function = Bytes::new(Some(0));
        let error = CommandRegister::new(Command::empty())
            .bus_master_off(&ConfigSpace::new(&function))
            .unwrap_err();
        assert!(matches!(error, CommandError::NoAnswer { read: 0, .. }));
    }

    #[test]
    fn bus_master_that_stays_on_is_an_error() {
        let function = Bytes::new(Some(0x0406));
        let error = CommandRegister::new(Command::empty())
            .bus_master_off(&ConfigSpace::new(&function))
            .unwrap_err();
        assert!(matches!(error, CommandError::NotTaken { read: 0x0406, .. }));
    }
}
