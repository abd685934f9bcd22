//! Functions that cannot be used are refused by name, and nothing of them stays mapped.
#![forbid(unsafe_code)]

use std::sync::Arc;

use failstop::device::{Device, DeviceError, Options};
use failstop::provider::{Config, ProviderError};
use failstop_pci::clock::ManualClock;
use failstop_pci::testing::{FakeFunction, limits_39_bits};
use failstop_pci::window::WindowError;

/// The ids, command and status of a function, as config space begins.
fn header(vendor: u16, device: u16) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[0..2].copy_from_slice(&vendor.to_le_bytes());
    bytes[2..4].copy_from_slice(&device.to_le_bytes());
    bytes[4] = 0x02; // Memory Space Enable.
    bytes[0x0a..0x0c].copy_from_slice(&[0x00, 0x02]); // Ethernet.
    bytes
}

fn refusal(function: FakeFunction, config: &Config) -> DeviceError {
    let function = Arc::new(function);
    let options = Options {
        clock: Arc::new(ManualClock::default()),
        ..Options::default()
    };
    let error = Device::open_with(function.clone(), config, options).expect_err("it was opened");
    assert_eq!(function.mapped(), [], "{error}");
    error
}

fn fake() -> FakeFunction {
    FakeFunction::new(limits_39_bits()).unwrap()
}

/// It says what it is and what there is for it (R13).
#[test]
fn an_unknown_device_is_named_by_its_ids() {
    let error = refusal(
        fake().with_config(&header(0x1af4, 0x1041)),
        &Config::default(),
    );
    assert!(matches!(
        error,
        DeviceError::Unknown {
            vendor: 0x1af4,
            id: 0x1041,
            ..
        }
    ));
    let text = error.to_string();
    assert!(
        text.contains("1af4:1041") && text.contains("82576"),
        "{text}"
    );
}

#[test]
fn config_space_of_all_ones_is_a_device_that_is_gone() {
    let error = refusal(fake().with_config(&[0xff; 256]), &Config::default());
    assert!(
        matches!(
            error,
            DeviceError::Gone {
                value: u32::MAX,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn config_space_of_all_zero_is_a_device_that_is_gone() {
    let error = refusal(fake(), &Config::default());
    assert!(
        matches!(error, DeviceError::Gone { value: 0, .. }),
        "{error}"
    );
}

#[test]
fn a_live_id_with_a_dead_command_register_is_a_device_that_is_gone() {
    let mut bytes = header(0x8086, 0x10c9);
    bytes[4..6].copy_from_slice(&[0xff, 0xfb]); // As kernel VFIO shows a function that was removed.
    let error = refusal(fake().with_config(&bytes), &Config::default());
    assert!(matches!(error, DeviceError::Gone { .. }), "{error}");
}

#[test]
fn a_bar_that_is_too_small_is_named_with_both_sizes() {
    let function = fake()
        .with_config(&header(0x8086, 0x10c9))
        .with_bar_size(0x4000);
    let error = refusal(function, &Config::default());
    assert!(
        matches!(error, DeviceError::Window(WindowError::TooSmall { .. })),
        "{error}"
    );
    let text = error.to_string();
    assert!(
        text.contains("0x4000") && text.contains("0x20000"),
        "{text}"
    );
}

#[test]
fn registers_of_all_zero_are_a_device_that_is_gone() {
    let error = refusal(
        fake().with_config(&header(0x8086, 0x10c9)),
        &Config::default(),
    );
    assert!(
        matches!(
            error,
            DeviceError::Provider(ProviderError::Gone { value: 0, .. })
        ),
        "{error}"
    );
}

#[test]
fn frames_longer_than_the_device_takes_are_refused_with_the_range() {
    let config = Config {
        longest_frame: 20_000,
        ..Config::default()
    };
    let error = refusal(fake().with_config(&header(0x8086, 0x10c9)), &config);
    assert!(
        matches!(
            error,
            DeviceError::Provider(ProviderError::OutOfRange { .. })
        ),
        "{error}"
    );
    assert!(error.to_string().contains("9724"), "{error}");
}
