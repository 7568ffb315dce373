//! A forked child has no threads but the one that forked; the pool starts its own again.
#![cfg(unix)]

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use oxidiff_kernels::pool::Pool;

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(status: i32) -> !;
}

fn sum(pool: &Pool) -> usize {
    let sum = AtomicUsize::new(0);
    let outcome = pool.run_scratch(100, 64, |task, worker| {
        // SAFETY: 64 bytes of scratch memory were asked for.
        unsafe { worker.scratch.write_bytes(1, 64) };
        sum.fetch_add(task, Relaxed);
    });
    outcome.map_or(0, |()| sum.into_inner())
}

#[test]
fn the_pool_works_in_a_forked_child() {
    let pool = Pool::global();
    pool.set_threads(3);
    assert_eq!(sum(pool), 4950);
    // SAFETY: this test binary runs this one test; the child only uses the pool and leaves by `_exit`.
    unsafe {
        let child = fork();
        if child == 0 {
            _exit(i32::from(sum(pool) != 4950 || sum(pool) != 4950));
        }
        let mut status = -1;
        assert_eq!(waitpid(child, &mut status, 0), child);
        assert_eq!(status, 0);
    }
    assert_eq!(sum(pool), 4950);
}
