//! Values of one thread, in a model check: of one thread of the model, or of the system outside it.
//!
//! Owns what [`thread_local!`](super::thread_local) expands to with the feature `model`.

use std::cell::{Cell, RefCell};

/// A value of each thread, with the calls of `std::thread::LocalKey` that fjord uses.
#[derive(Debug)]
pub struct LocalKey<T: 'static> {
    #[doc(hidden)]
    pub outside: &'static std::thread::LocalKey<T>,
    #[doc(hidden)]
    pub inside: &'static shuttle::thread::LocalKey<T>,
}

/// The thread has dropped the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

impl<T: 'static> LocalKey<T> {
    /// Gives `read` the value, which is made if this is the first call.
    ///
    /// # Errors
    /// The thread ends, and has dropped the value.
    pub fn try_with<R>(&'static self, read: impl FnOnce(&T) -> R) -> Result<R, Gone> {
        match super::model::is_running() {
            true => self.inside.try_with(read).map_err(|_| Gone),
            false => self.outside.try_with(read).map_err(|_| Gone),
        }
    }

    fn with<R>(&'static self, read: impl FnOnce(&T) -> R) -> R {
        self.try_with(read).expect("a thread that ends uses a value of its own")
    }
}

impl<T: Copy + 'static> LocalKey<Cell<T>> {
    /// The value.
    pub fn get(&'static self) -> T {
        self.with(Cell::get)
    }

    /// Changes the value.
    pub fn set(&'static self, value: T) {
        self.with(|cell| cell.set(value));
    }
}

impl<T: 'static> LocalKey<RefCell<T>> {
    /// Gives `read` the value.
    pub fn with_borrow<R>(&'static self, read: impl FnOnce(&T) -> R) -> R {
        self.with(|cell| read(&cell.borrow()))
    }

    /// Gives `change` the value.
    pub fn with_borrow_mut<R>(&'static self, change: impl FnOnce(&mut T) -> R) -> R {
        self.with(|cell| change(&mut cell.borrow_mut()))
    }
}

/// As `std::thread_local!`, for values with a constant initial value.
#[doc(hidden)]
#[macro_export]
macro_rules! model_thread_local {
    ($($(#[$attribute:meta])* static $name:ident: $type:ty = const { $init:expr };)*) => {$(
        $(#[$attribute])*
        static $name: $crate::lock::LocalKey<$type> = {
            ::std::thread_local!(static OUTSIDE: $type = const { $init });
            $crate::lock::model::shuttle::thread_local!(static INSIDE: $type = const { $init });
            $crate::lock::LocalKey { outside: &OUTSIDE, inside: &INSIDE }
        };
    )*};
}
