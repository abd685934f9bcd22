use super::*;
use crate::clock::ManualClock;
use crate::testing::{BAR_SIZE, FakeFunction, limits_39_bits};

const CONTROL: Reg = Reg::at(0x2828);
const ENABLE: u32 = 1 << 25;
const THRESHOLDS: u32 = 0x0001_0808;

const STOP: StopBit = StopBit {
    queue: Some(QueueName::Receive(1)),
    register: CONTROL.offset(),
    stop: NonZeroU32::new(ENABLE).unwrap(),
    alive: NonZeroU32::new(THRESHOLDS).unwrap(),
    deadline: Duration::from_millis(10),
    interval: Duration::from_micros(100),
    settle: Duration::from_micros(100),
};

fn open(kind: Kind) -> (Arc<FakeFunction>, Arc<Window>) {
    let function = FakeFunction::new(limits_39_bits()).unwrap().with_kind(kind);
    let function = Arc::new(function.with_decoding());
    let window = Window::open(function.clone(), Generation::FIRST, 0, BAR_SIZE).unwrap();
    window.write(CONTROL, THRESHOLDS | ENABLE);
    (function, window)
}

/// What a provider does to stop a queue.
fn stop(window: &Window) -> Result<Stopped, NoAnswer> {
    window.write(CONTROL, THRESHOLDS);
    window.wait_stopped(&ManualClock::default(), &STOP)
}

#[test]
fn a_living_function_whose_bit_reads_clear_has_stopped() {
    let (function, window) = open(Kind::Container);
    assert_eq!(stop(&window).unwrap().device(), function.id());
}

#[test]
fn c32_neither_all_zero_nor_all_ones_is_an_answer() {
    for kind in [Kind::Container, Kind::VfioUser] {
        let (_function, window) = open(kind);
        for value in [0, u32::MAX] {
            window.write(CONTROL, value);
            let answer = window.wait_stopped(&ManualClock::default(), &STOP);
            assert!(matches!(answer, Err(NoAnswer::Gone { .. })), "{kind}");
        }
    }
}

#[test]
fn c14_what_was_written_to_the_guards_private_pages_is_no_answer() {
    let (function, window) = open(Kind::Container);
    function.turn_decoding_off().unwrap();
    assert!(matches!(stop(&window), Err(NoAnswer::Gone { .. })));
    // The page does hold what the stop sequence wrote.
    assert_eq!(window.read(CONTROL), THRESHOLDS);
}

#[test]
fn c33_a_detached_window_gives_no_answer() {
    for kind in [Kind::Container, Kind::VfioUser] {
        let (_function, window) = open(kind);
        window.detach().unwrap();
        assert!(
            matches!(stop(&window), Err(NoAnswer::Gone { .. })),
            "{kind}"
        );
    }
}

/// What another life of the function's registers hold is not for an old one to change (R4.3).
#[test]
fn c33_what_is_written_to_a_detached_window_reaches_no_register() {
    let (function, old) = open(Kind::Container);
    let doorbell = old.doorbell(CONTROL).unwrap();
    old.detach().unwrap();
    let new = Window::open(function, Generation::FIRST.next(), 0, BAR_SIZE).unwrap();
    old.write(CONTROL, 1);
    doorbell.ring(2);
    assert_eq!(new.read(CONTROL), THRESHOLDS | ENABLE);
}

/// What the device had under way when the bit cleared has landed by then (R3.1).
#[test]
fn a_queue_has_stopped_only_after_its_settle_time() {
    let (_function, window) = open(Kind::Container);
    window.write(CONTROL, THRESHOLDS);
    let clock = ManualClock::default();
    drop(window.wait_stopped(&clock, &STOP).unwrap());
    assert!(clock.now() >= STOP.settle);
}

#[test]
fn c32_a_page_that_merely_stores_what_was_written_is_no_servers_answer() {
    let (function, window) = open(Kind::VfioUser);
    function.answer_register(CONTROL.offset().into(), THRESHOLDS | ENABLE);
    assert!(matches!(stop(&window), Err(NoAnswer::TimedOut { .. })));
    assert_eq!(window.read(CONTROL), THRESHOLDS);
}

/// It is away while it is read, and back while it is written.
#[test]
fn c17_a_reading_of_all_ones_is_not_written_back() {
    let function = FakeFunction::new(limits_39_bits()).unwrap().by_messages();
    let function = Arc::new(function.with_decoding());
    let window = Window::open(function.clone(), Generation::FIRST, 0, BAR_SIZE).unwrap();
    let register = Reg::<u32>::at(0x20);
    function.set_register(0x20, 0x11);
    window.update(register, |bits| bits | 0x100);
    assert_eq!(function.register(0x20), 0x111);
    function.answer_register(0x20, u32::MAX);
    window.update(register, |bits| bits & !1);
    assert_eq!(function.register(0x20), 0x111);
}
