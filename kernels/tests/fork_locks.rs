//! A forked child finds no lock held, however busy other threads are with them.
#![cfg(unix)]

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use oxidiff_kernels::fork::{self, Mutex, RwLock};

unsafe extern "C" {
    fn alarm(seconds: u32) -> u32;
    fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(status: i32) -> !;
}

/// Held nearly always by one thread or the other; the second inside the first.
static OUTER: Mutex<u64> = Mutex::new(0);
static INNER: RwLock<[u64; 2]> = RwLock::new([0; 2]);

fn work() {
    let mut outer = OUTER.lock();
    *outer += 1;
    let mut inner = INNER.write();
    inner[0] += 1;
    std::thread::sleep(Duration::from_micros(50));
    // Not whole before this.
    inner[1] += 1;
}

#[test]
fn no_child_finds_a_lock_held() {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    work();
                }
            });
        }
        let mut failed = 0;
        for _ in 0..100 {
            let start = Instant::now();
            fork::before();
            assert!(start.elapsed() < Duration::from_secs(2), "those inside get out, those outside wait");
            // SAFETY: this binary runs this one test; the child takes the locks and leaves by `_exit`, or by the alarm where
            // they are held.
            unsafe {
                let child = fork();
                if child == 0 {
                    fork::after_in_child();
                    alarm(5);
                    work();
                    let [first, second] = *INNER.read();
                    _exit(i32::from(first != second || OUTER.try_lock().is_none()));
                }
                fork::after_in_parent();
                let mut status = -1;
                assert_eq!(waitpid(child, &mut status, 0), child);
                failed += i32::from(status != 0);
            }
        }
        is_over.store(true, Relaxed);
        assert_eq!(failed, 0, "children of 100 that hung or saw a value in the middle of a change");
    });
    // Who is inside may fork: it does not wait for itself.
    let held = OUTER.lock();
    let start = Instant::now();
    fork::before();
    assert!(start.elapsed() < Duration::from_secs(2));
    fork::after_in_parent();
    drop(held);
    assert!(fork::shielded(|| OUTER.try_lock().is_some()));
    // A fork that waits for another handler's lock, whose holder waits at the gate, does not wait for ever.
    fork::before();
    std::thread::scope(|scope| scope.spawn(work).join()).expect("the thread gets in");
    fork::after_in_parent();
}
