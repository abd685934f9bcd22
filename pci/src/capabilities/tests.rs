use proptest::prelude::*;

use super::*;

/// The configuration space of a real 82576 under Linux's igb, as a public `lspci -xxxx` shows it:
/// address, then 16 bytes. Lines that are left out are zero.
const REAL_82576: &str = "
00: 86 80 c9 10 07 04 10 00 01 00 00 02 10 00 80 00
10: 00 00 80 e0 00 00 00 e0 21 10 00 00 00 00 84 e0
20: 00 00 00 00 00 00 00 00 00 00 00 00 86 80 3c a0
30: 00 00 80 c7 40 00 00 00 00 00 00 00 0b 01 00 00
40: 01 50 23 c8 00 20 00 1a 00 00 00 00 00 00 00 00
50: 05 70 80 01 00 00 00 00 00 00 00 00 00 00 00 00
70: 11 a0 09 80 03 00 00 00 03 20 00 00 00 00 00 00
a0: 10 00 02 00 c2 8c 00 10 30 28 19 00 41 6c 03 00
b0: 42 00 41 10 00 00 00 00 00 00 00 00 00 00 00 00
c0: 00 00 00 00 1f 00 00 00 00 00 00 00 00 00 00 00
e0: 03 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
100: 01 00 01 14 00 00 00 00 00 00 00 00 11 20 06 00
110: 00 20 00 00 00 20 00 00 00 00 00 00 00 00 00 00
140: 03 00 01 15 e0 46 2b ff ff 21 1b 00 00 00 00 00
150: 0e 00 01 16 00 01 00 00 00 00 00 00 00 00 00 00
160: 10 00 01 00 00 00 00 00 09 00 00 00 08 00 08 00
170: 01 00 00 00 80 01 02 00 00 00 ca 10 53 05 00 00
180: 01 00 00 00 04 00 84 d2 00 00 00 00 00 00 00 00
190: 04 00 86 d2 00 00 00 00 00 00 00 00 00 00 00 00
";

fn real_82576() -> Vec<u8> {
    let mut config = vec![0; 4096];
    for line in REAL_82576.trim().lines() {
        let (at, bytes) = line.split_once(": ").unwrap();
        let at = usize::from_str_radix(at, 16).unwrap();
        for (index, byte) in bytes.split(' ').enumerate() {
            config[at + index] = u8::from_str_radix(byte, 16).unwrap();
        }
    }
    config
}

#[test]
fn real_82576_lists_are_walked_in_order() {
    let entries = Capabilities::parse(&real_82576()).unwrap().entries;
    let seen: Vec<(u16, u16)> = entries.iter().map(|e| (e.id, e.offset)).collect();
    assert_eq!(
        seen,
        [
            (id::POWER_MANAGEMENT, 0x40),
            (id::MSI, 0x50),
            (id::MSI_X, 0x70),
            (id::PCI_EXPRESS, 0xa0),
            (extended_id::ADVANCED_ERRORS, 0x100),
            (extended_id::SERIAL_NUMBER, 0x140),
            (extended_id::ARI, 0x150),
            (extended_id::SR_IOV, 0x160),
        ]
    );
}

// The expected values below are lspci's own decoding of those bytes.

#[test]
fn real_82576_pcie_is_decoded() {
    let capabilities = Capabilities::parse(&real_82576()).unwrap();
    let pcie = capabilities.pcie.unwrap();
    assert_eq!((pcie.offset, pcie.version), (0xa0, 2));
    assert_eq!(pcie.port_type, PortType::Endpoint);
    assert!(pcie.flr && capabilities.has_flr());
    assert_eq!(pcie.max_payload_supported, 512);
    assert_eq!(pcie.max_payload, 256);
    assert_eq!(pcie.max_read_request, 512);
    assert!(
        pcie.control
            .contains(DeviceControl::RELAXED_ORDERING | DeviceControl::NO_SNOOP)
    );
    assert!(!pcie.control.contains(DeviceControl::FATAL_ERRORS));
    assert!(
        pcie.status
            .contains(DeviceStatus::CORRECTABLE_ERROR | DeviceStatus::UNSUPPORTED_REQUEST)
    );
    assert!(!pcie.status.contains(DeviceStatus::TRANSACTIONS_PENDING));
    assert_eq!(pcie.device_status(), 0xaa);
    assert_eq!((pcie.link.max_width, pcie.link.width), (4, 4));
    assert_eq!(pcie.link.speed.to_string(), "2.5 GT/s");
}

#[test]
fn real_82576_interrupts_are_decoded() {
    let capabilities = Capabilities::parse(&real_82576()).unwrap();
    let msi = capabilities.msi.unwrap();
    assert!(msi.address_64 && msi.maskable && !msi.enabled);
    assert_eq!(msi.vectors, 1);
    let msix = capabilities.msix.unwrap();
    assert!(msix.enabled && !msix.masked);
    assert_eq!(msix.vectors, 10);
    assert_eq!(msix.table, Part { bar: 3, offset: 0 });
    assert_eq!(
        msix.pending,
        Part {
            bar: 3,
            offset: 0x2000
        }
    );
}

#[test]
fn real_82576_rest_is_decoded() {
    let capabilities = Capabilities::parse(&real_82576()).unwrap();
    let power = capabilities.power.unwrap();
    assert_eq!((power.state, power.no_soft_reset), (PowerState::D0, false));
    assert_eq!(power.control_status(), 0x44);
    assert_eq!(capabilities.advanced_errors.unwrap().correctable, 0x2000);
    assert_eq!(capabilities.ari.unwrap().next_function, 1);
    let sr_iov = capabilities.sr_iov.unwrap();
    assert_eq!((sr_iov.total_vfs, sr_iov.num_vfs), (8, 1));
    assert_eq!((sr_iov.vf_device, sr_iov.enabled), (0x10ca, true));
    assert!(!capabilities.ats_enabled());
}

#[test]
fn standard_part_alone_is_enough() {
    let capabilities = Capabilities::parse(&real_82576()[..256]).unwrap();
    assert!(capabilities.pcie.is_some() && capabilities.sr_iov.is_none());
}

#[test]
fn too_few_bytes_are_refused() {
    assert_eq!(
        Capabilities::parse(&[0; 255]),
        Err(CapabilityError::Short { bytes: 255 })
    );
}

#[test]
fn a_function_that_does_not_answer_is_told_apart() {
    assert_eq!(
        Capabilities::parse(&[0xff; 4096]),
        Err(CapabilityError::AllOnes)
    );
}

#[test]
fn cyclic_standard_list_is_an_error() {
    let mut config = real_82576();
    config[0x71] = 0x50;
    assert_eq!(
        Capabilities::parse(&config),
        Err(CapabilityError::Cyclic {
            list: List::Standard,
            from: 0x70,
            to: 0x50
        })
    );
}

#[test]
fn cyclic_extended_list_is_an_error() {
    let mut config = real_82576();
    config[0x153] = 0x14;
    config[0x152] = 0x01;
    assert_eq!(
        Capabilities::parse(&config),
        Err(CapabilityError::Cyclic {
            list: List::Extended,
            from: 0x150,
            to: 0x140
        })
    );
}

#[test]
fn pointer_into_the_header_is_an_error() {
    let mut config = real_82576();
    config[0x41] = 0x10;
    assert_eq!(
        Capabilities::parse(&config),
        Err(CapabilityError::OutOfRange {
            list: List::Standard,
            from: 0x40,
            to: 0x10
        })
    );
}

#[test]
fn extended_pointer_into_the_standard_part_is_an_error() {
    let mut config = real_82576();
    config[0x103] = 0x04;
    assert_eq!(
        Capabilities::parse(&config),
        Err(CapabilityError::OutOfRange {
            list: List::Extended,
            from: 0x100,
            to: 0x40
        })
    );
}

#[test]
fn truncated_capability_is_an_error() {
    let mut config = real_82576();
    // PCIe version 2 takes 60 bytes; from 0xe0 on there are 32.
    config[0xe0..0xe4].copy_from_slice(&[0x10, 0, 2, 0]);
    config[0x71] = 0xe0;
    assert_eq!(
        Capabilities::parse(&config),
        Err(CapabilityError::Truncated {
            list: List::Standard,
            id: id::PCI_EXPRESS,
            offset: 0xe0,
            needed: 0x3c
        })
    );
}

#[test]
fn overlapping_capabilities_are_an_error() {
    let mut config = real_82576();
    // MSI with 64-bit address and masks takes 24 bytes from 0x50.
    config[0x60] = 0x01;
    config[0xa1] = 0x60;
    assert_eq!(
        Capabilities::parse(&config),
        Err(CapabilityError::Overlap {
            list: List::Standard,
            first: 0x50,
            second: 0x60
        })
    );
}

#[test]
fn ghost_of_the_header_is_no_extended_list() {
    let mut config = real_82576();
    // No PCIe: MSI-X is the last one, and 0x100 repeats the header as some bridges do.
    config[0x71] = 0;
    config.copy_within(0..256, 256);
    assert!(Capabilities::parse(&config).unwrap().sr_iov.is_none());
}

#[test]
fn c44_ats_enable_is_seen() {
    let mut config = real_82576();
    config[0x162..0x164].copy_from_slice(&[0x01, 0x20]);
    config[0x200..0x208].copy_from_slice(&[0x0f, 0, 1, 0, 0, 0, 0, 0x80]);
    let capabilities = Capabilities::parse(&config).unwrap();
    assert!(capabilities.ats_enabled());
    assert_eq!(capabilities.ats.unwrap().control(), 0x206);
}

#[test]
fn vendor_capabilities_carry_their_length() {
    let mut config = real_82576();
    config[0xe0..0xe3].copy_from_slice(&[0x09, 0, 0x14]);
    config[0xa1] = 0xe0;
    assert_eq!(
        Capabilities::parse(&config).unwrap().vendor,
        [Vendor {
            list: List::Standard,
            offset: 0xe0,
            len: 0x14
        }]
    );
}

/// The real space with a few bytes changed: near enough that many are still accepted.
fn damaged() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec((0usize..0x1a0, any::<u8>()), 0..4).prop_map(|changes| {
        let mut config = real_82576();
        for (at, value) in changes {
            config[at] = value;
        }
        config
    })
}

proptest! {
    #[test]
    fn random_bytes_never_panic(mut config in proptest::collection::vec(any::<u8>(), 0..4200)) {
        if let Some(status) = config.get_mut(6) {
            *status |= 0x10;
        }
        let _ = Capabilities::parse(&config);
    }

    #[test]
    fn every_accepted_entry_lies_inside_and_alone(config in damaged()) {
        if let Ok(capabilities) = Capabilities::parse(&config) {
            let mut used = vec![false; config.len()];
            for entry in capabilities.entries {
                let start = usize::from(entry.offset);
                for byte in &mut used[start..start + usize::from(entry.len)] {
                    prop_assert!(!std::mem::replace(byte, true), "{:?} overlaps", entry);
                }
            }
        }
    }
}
