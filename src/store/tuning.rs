//! The tuning database: which choice was fastest for which op, on which machine.
//!
//! One SQLite file, readable with any client. A row's key says everything that the measurement depends on, so that a
//! row of another machine, driver or kernel version is simply never found. Writers hold the file for one short
//! transaction; a writer that is killed leaves a journal that the next one rolls back.
//!
//! A file that is damaged is moved aside and begun anew; one that cannot be written is read; one of another schema is another
//! version's, and left alone. A row that is no measurement (changed by hand, or by a disk) is none.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, OptionalExtension, Row, params};

use crate::error::{Error, Result};

/// Version of the schema, kept in SQLite's `user_version`.
pub const SCHEMA: i64 = 1;
/// Marks the file as this database, kept in SQLite's `application_id`.
const APPLICATION: i64 = 0x0F1D_1FF0;
/// How long a writer waits for another one.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest text in a row; longer ones are no rows of ours.
const MAX_TEXT: usize = 4096;

const CREATE: &str = "
    CREATE TABLE choices (
        op TEXT NOT NULL,          -- what is computed: op, types, fixed sizes and attributes
        bucket TEXT NOT NULL,      -- the run-time sizes, rounded
        device TEXT NOT NULL,      -- processor or GPU, threads or driver
        library TEXT NOT NULL,     -- version of the kernels or of the vendor's library
        choice TEXT NOT NULL,      -- the fastest candidate
        seconds REAL NOT NULL,     -- its time in a step, with the packing of its weight where runs pack
        default_seconds REAL NOT NULL, -- the time of what would be chosen without tuning, measured beside it
        workspace_bytes INTEGER NOT NULL,
        measured_at INTEGER NOT NULL,  -- seconds since 1970
        PRIMARY KEY (op, bucket, device, library)
    ) WITHOUT ROWID;
";

/// What a measurement depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Op, types, fixed sizes and attributes.
    pub op: String,
    /// Run-time sizes, rounded to a bucket.
    pub bucket: String,
    /// The device, and what it was driven with.
    pub device: String,
    /// Version of the kernels.
    pub library: String,
}

/// A measured choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// What it is for.
    pub key: Key,
    /// The fastest candidate.
    pub choice: String,
    /// Its time.
    pub seconds: f64,
    /// The time of the choice that is made without tuning.
    pub default_seconds: f64,
    /// Scratch memory that it takes.
    pub workspace_bytes: i64,
    /// Seconds since 1970.
    pub measured_at: i64,
}

impl Entry {
    /// Whether a measurement can look like this, and nothing is too long to be one of ours.
    fn is_usable(&self) -> bool {
        let Key { op, bucket, device, library } = &self.key;
        let is_time = |seconds: f64| seconds.is_finite() && seconds > 0.0;
        [op, bucket, device, library, &self.choice].iter().all(|text| text.len() <= MAX_TEXT)
            && is_time(self.seconds)
            && is_time(self.default_seconds)
            && self.workspace_bytes >= 0
            && self.measured_at >= 0
    }
}

/// An open database.
#[derive(Debug)]
pub struct Database {
    connection: Mutex<Connection>,
    path: PathBuf,
    /// What was wrong with the file, if it was replaced or can only be read.
    pub complaint: Option<String>,
}

fn failed(path: &Path, error: &rusqlite::Error) -> Error {
    Error::Cache { what: format!("tuning database {}: {error}", path.display()) }
}

impl Database {
    /// Opens the database at `path`, made if it is new. A damaged one is moved aside; one that cannot be written is read.
    ///
    /// # Errors
    /// [`Error::Cache`] if there is none and none can be made, with what was in the way.
    pub fn open(path: &Path) -> Result<Self> {
        use rusqlite::ErrorCode::{CannotOpen, PermissionDenied, ReadOnly};
        if let Some(folder) = path.parent() {
            // If this fails, so does opening, with the better message.
            let _ = std::fs::create_dir_all(folder);
        }
        let error = match writable(path) {
            Ok(connection) => return Ok(Self::of(connection, path, None)),
            Err(error) => error,
        };
        if is_damage(&error) {
            let aside = path.with_extension("damaged");
            if std::fs::rename(path, &aside).is_ok() {
                let what = format!("{}; kept as {}, begun anew", failed(path, &error), aside.display());
                return writable(path).map(|c| Self::of(c, path, Some(what))).map_err(|error| failed(path, &error));
            }
        }
        // What a failed attempt to make one left behind, say on a full disk, is no database: the attempt says more.
        let is_for_reading = matches!(error.sqlite_error_code(), Some(CannotOpen | PermissionDenied | ReadOnly));
        Self::open_read_only(path).map_err(|reading| if is_for_reading { reading } else { failed(path, &error) })
    }

    /// Opens the database at `path` for reading, also from a file system that cannot be written.
    ///
    /// # Errors
    /// [`Error::Cache`] if it is missing, damaged or of another schema.
    pub fn open_read_only(path: &Path) -> Result<Self> {
        let connect = || -> rusqlite::Result<Connection> {
            // Where it can be written, what a killed writer left is rolled back first; where not, SQLite opens it for reading.
            let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
            connection.busy_timeout(PATIENCE)?;
            connection.pragma_update(None, "query_only", true)?;
            check(&connection)?;
            Ok(connection)
        };
        let what = format!("{} can only be read: what is measured is not kept", path.display());
        connect().map(|c| Self::of(c, path, Some(what))).map_err(|error| failed(path, &error))
    }

    fn of(connection: Connection, path: &Path, complaint: Option<String>) -> Self {
        Self { connection: Mutex::new(connection), path: path.to_owned(), complaint }
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // Every use is one statement or one transaction, which a panic rolls back.
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_with<T>(&self, f: impl FnOnce(&mut Connection) -> rusqlite::Result<T>) -> Result<T> {
        f(&mut self.connection()).map_err(|error| failed(&self.path, &error))
    }

    /// The entry of `key`.
    ///
    /// # Errors
    /// [`Error::Cache`] if the file cannot be read.
    pub fn find(&self, key: &Key) -> Result<Option<Entry>> {
        self.try_with(|c| {
            let mut find = c.prepare_cached(
                "SELECT * FROM choices WHERE op = ?1 AND bucket = ?2 AND device = ?3 AND library = ?4",
            )?;
            let found = find.query_row(params![key.op, key.bucket, key.device, key.library], |row| Ok(entry(row)));
            Ok(found.optional()?.flatten())
        })
    }

    /// Every entry, in the order of the keys.
    ///
    /// # Errors
    /// [`Error::Cache`] if the file cannot be read.
    pub fn entries(&self) -> Result<Vec<Entry>> {
        self.try_with(|c| {
            let mut all = c.prepare("SELECT * FROM choices ORDER BY op, bucket, device, library")?;
            let rows = all.query_map([], |row| Ok(entry(row)))?;
            rows.filter_map(std::result::Result::transpose).collect()
        })
    }

    /// Adds entries in one transaction. Of two for one key the later measurement stays; what is no measurement is left out.
    ///
    /// # Errors
    /// [`Error::Cache`] if the file cannot be written; nothing is added then.
    pub fn add(&self, entries: &[Entry]) -> Result<()> {
        self.try_with(|c| {
            let transaction = c.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
            {
                let mut add = transaction.prepare_cached(
                    "INSERT INTO choices VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
                     ON CONFLICT DO UPDATE SET choice = excluded.choice, seconds = excluded.seconds,
                        default_seconds = excluded.default_seconds, workspace_bytes = excluded.workspace_bytes,
                        measured_at = excluded.measured_at
                     WHERE excluded.measured_at >= measured_at",
                )?;
                for e in entries.iter().filter(|e| e.is_usable()) {
                    let k = &e.key;
                    add.execute(params![
                        k.op,
                        k.bucket,
                        k.device,
                        k.library,
                        e.choice,
                        e.seconds,
                        e.default_seconds,
                        e.workspace_bytes,
                        e.measured_at
                    ])?;
                }
            }
            transaction.commit()
        })
    }

    /// Removes every entry.
    ///
    /// # Errors
    /// [`Error::Cache`] if the file cannot be written.
    pub fn clear(&self) -> Result<()> {
        self.try_with(|c| c.execute("DELETE FROM choices", []).map(|_| ()))
    }
}

/// A connection to the database at `path`, whose tables are made if it is new.
fn writable(path: &Path) -> rusqlite::Result<Connection> {
    let mut connection = Connection::open(path)?;
    connection.busy_timeout(PATIENCE)?;
    // A rollback journal, unlike a write-ahead log, leaves one file behind that a read-only file system can hold.
    connection.pragma_update(None, "journal_mode", "DELETE")?;
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    let transaction = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    let tables: i64 = transaction.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if tables == 0 {
        transaction.execute_batch(CREATE)?;
        transaction.pragma_update(None, "application_id", APPLICATION)?;
        transaction.pragma_update(None, "user_version", SCHEMA)?;
    }
    transaction.commit()?;
    check(&connection)?;
    Ok(connection)
}

/// Whether this is a whole database of this schema.
fn check(connection: &Connection) -> rusqlite::Result<()> {
    let number = |name: &str| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let (application, schema) = (number("application_id")?, number("user_version")?);
    if application == APPLICATION && schema != SCHEMA {
        let what = format!("it has schema {schema}, this oxidiff uses {SCHEMA}");
        return Err(rusqlite::Error::SqliteFailure(
            rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_MISMATCH),
            Some(what),
        ));
    }
    if application != APPLICATION {
        return Err(refused(format!("it belongs to application {application:#x}")));
    }
    let verdict: String = connection.pragma_query_value(None, "quick_check", |row| row.get(0))?;
    if verdict != "ok" {
        return Err(refused(verdict));
    }
    // The table has the columns that are asked for, in this order.
    connection.prepare(
        "SELECT op, bucket, device, library, choice, seconds, default_seconds, workspace_bytes, measured_at FROM choices",
    )?;
    let columns = connection.prepare("SELECT * FROM choices")?.column_count();
    if columns == 9 { Ok(()) } else { Err(refused(format!("the table has {columns} columns"))) }
}

fn refused(why: String) -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT), Some(why))
}

fn is_damage(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    match error {
        rusqlite::Error::SqliteFailure(e, _) => matches!(e.code, DatabaseCorrupt | NotADatabase),
        // The table is missing or another one.
        rusqlite::Error::SqlInputError { .. } => true,
        _ => false,
    }
}

/// The row's entry; `None` where it is not one of ours.
fn entry(row: &Row<'_>) -> Option<Entry> {
    let text = |i: usize| row.get::<_, String>(i).ok();
    let entry = Entry {
        key: Key { op: text(0)?, bucket: text(1)?, device: text(2)?, library: text(3)? },
        choice: text(4)?,
        seconds: row.get(5).ok()?,
        default_seconds: row.get(6).ok()?,
        workspace_bytes: row.get(7).ok()?,
        measured_at: row.get(8).ok()?,
    };
    Some(entry).filter(Entry::is_usable)
}
