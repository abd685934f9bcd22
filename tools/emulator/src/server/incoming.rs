//! What a message is, as faults of the server name it.

use failstop_pci::transport::vfio_user::wire::{Command, RegionAccess, split};

use super::connection::Message;
use super::handler::CONFIG;
use crate::faults::fault::{MessageType, Messages};

/// The type of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Incoming {
    /// None for commands that no fault names.
    pub(super) of: Option<MessageType>,
    /// It reads or writes configuration space.
    is_config: bool,
}

impl Incoming {
    /// What this message is.
    pub(super) fn of(message: &Message) -> Self {
        let command = Command::from_number(message.header.command);
        let of = command.and_then(|command| {
            Some(match command {
                Command::Version => MessageType::Version,
                Command::DmaMap => MessageType::Map,
                Command::DmaUnmap => MessageType::Unmap,
                Command::DeviceGetInfo => MessageType::Info,
                Command::DeviceGetRegionInfo => MessageType::RegionInfo,
                Command::DeviceGetIrqInfo => MessageType::IrqInfo,
                Command::DeviceSetIrqs => MessageType::SetIrqs,
                Command::RegionRead => MessageType::Read,
                Command::RegionWrite => MessageType::Write,
                Command::DeviceReset => MessageType::Reset,
                Command::DeviceGetRegionIoFds | Command::DmaRead | Command::DmaWrite => {
                    return None;
                }
            })
        });
        let accesses = matches!(of, Some(MessageType::Read | MessageType::Write));
        let is_config = accesses
            && split::<RegionAccess>("region access", &message.payload)
                .is_ok_and(|(access, _)| access.region == CONFIG);
        Self { of, is_config }
    }

    /// Whether it is of this type.
    pub(super) fn is(self, of: MessageType) -> bool {
        match of {
            MessageType::Config => self.is_config,
            other => self.of == Some(other),
        }
    }

    /// Whether a fault concerns it.
    pub(super) fn is_among(self, messages: Messages) -> bool {
        match messages.of {
            Some(of) => self.is(of),
            None => !self.is(MessageType::Version),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use failstop_pci::transport::vfio_user::wire::{Flags, Header};
    use zerocopy::IntoBytes;

    fn message(command: Command, payload: &[u8]) -> Message {
        Message {
            header: Header::command(1, command, Flags::empty(), payload.len()),
            payload: payload.to_vec(),
            fds: Vec::new(),
        }
    }

    fn access(region: u32) -> Vec<u8> {
        let access = RegionAccess {
            offset: 4,
            region,
            count: 2,
        };
        access.as_bytes().to_vec()
    }

    #[test]
    fn configuration_space_is_told_from_other_regions() {
        for (region, is_config) in [(CONFIG, true), (0, false)] {
            let incoming = Incoming::of(&message(Command::RegionWrite, &access(region)));
            assert_eq!(incoming.is(MessageType::Config), is_config);
            assert!(incoming.is(MessageType::Write) && !incoming.is(MessageType::Read));
        }
    }

    #[test]
    fn a_message_that_is_cut_short_is_no_access_of_configuration_space() {
        let incoming = Incoming::of(&message(Command::RegionRead, &[0; 3]));
        assert!(!incoming.is(MessageType::Config));
    }

    #[test]
    fn a_fault_of_all_messages_leaves_the_version_alone() {
        let version = Incoming::of(&message(Command::Version, &[]));
        let unmap = Incoming::of(&message(Command::DmaUnmap, &[]));
        assert!(!version.is_among(Messages::ALL) && unmap.is_among(Messages::ALL));
    }
}
